"""The version of the bundle format: one integer for everything a bundle consists of.

It is written into the signed claim of every bundle, and grows when an older reader would misunderstand a newer bundle.

1  2026-12-01  First version.
"""

FORMAT_VERSION = 1
