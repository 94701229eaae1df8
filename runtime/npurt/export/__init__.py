"""Writing and reading what other tools load: PEFT adapters."""
