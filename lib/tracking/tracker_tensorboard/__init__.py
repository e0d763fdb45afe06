"""TensorBoard tracker."""
