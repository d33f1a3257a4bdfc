"""Class names and templates: what the classifier is asked."""
