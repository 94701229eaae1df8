"""The lean runtime: trains with a bundle that `npucc` compiled, without torch, transformers or a compiler."""
