"""What users do, on a real cluster: each file is one article or one promise."""
