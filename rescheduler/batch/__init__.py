"""`headway batch`: a file of requests, answered while online traffic leaves room."""
