"""What is right: two routes to the same answer, compared, with the noise floor that the comparison itself measured."""
