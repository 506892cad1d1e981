"""The train loop and its parts."""
