"""The web app: a page over the objects of :mod:`cliquetta.serve`."""
