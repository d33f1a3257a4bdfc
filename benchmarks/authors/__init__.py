"""Our methods beside their authors' code, on the same weights, pixels, views and features."""
