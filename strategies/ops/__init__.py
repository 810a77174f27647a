"""Pure functions on tensors that strategies are made of."""
