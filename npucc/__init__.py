"""Ahead-of-time compiler: a model configuration and a training recipe become a signed bundle of compiled graphs."""
