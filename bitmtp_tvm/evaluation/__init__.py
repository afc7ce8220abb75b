"""What a model is worth: next tokens and mask rows on held-out text, completions, HumanEval."""
