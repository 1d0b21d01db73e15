"""The methods that STAR's predictor is measured against (Table 1)."""
