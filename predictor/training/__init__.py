"""How the predictors are trained: rows, Lightning modules, search, export."""
