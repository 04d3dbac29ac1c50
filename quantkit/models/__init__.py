"""Where weights and graphs come from: a MODEL argument in, a Source and one traced graph out."""
