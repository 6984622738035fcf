"""What a training loop calls between backward and the optimizer's step."""
