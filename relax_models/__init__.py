"""What is computed: model configurations, low-bit formats, operations and layers; no hardware."""
