"""Runs the folder as the package `step`, whose modules import each other by relative names."""

import os
import sys
from importlib import import_module

# The last to be searched, so none of its neighbors hides a module of Python.
sys.path.append(os.path.dirname(sys.path.pop(0)))
import_module("step.job").main()
