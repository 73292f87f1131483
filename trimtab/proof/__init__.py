"""Verification: two routes to the same answer, compared, with a noise floor that the comparison measures itself."""
