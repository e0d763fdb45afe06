"""SGD: stochastic gradient descent with momentum."""
