"""Compile workers: processes in a toolchain's own environment that rebuild canonical graphs and compile them.

A worker is a script of its own that imports nothing of npucc: its environment has another torch, and npucc is not
installed there. What crosses between the two are canonical graphs as JSON, options, and files.
"""
