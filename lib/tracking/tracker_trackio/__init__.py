"""trackio tracker."""
