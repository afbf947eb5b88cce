"""The images of our own containers and the base image of sandboxes: built without any image registry, or loaded from an operator's tarball."""
