"""Writing and reading what other tools load: PEFT adapters and model folders."""
