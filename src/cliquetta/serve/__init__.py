"""The HTTP service and the web app."""
