"""The bundle format that npucc writes and npurt reads: containers, signatures, trust, programs and parts."""
