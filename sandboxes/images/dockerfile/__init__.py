"""Builds images from Dockerfiles without a daemon: a parser, steps in namespaces, and a cache of layers."""
