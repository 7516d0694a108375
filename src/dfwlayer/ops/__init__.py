"""What everything stands on: numbers per problem, rounding, tensors in objects, recordings."""
