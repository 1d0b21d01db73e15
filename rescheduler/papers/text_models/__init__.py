"""Fine-tuning of models that read text, for what the papers compare with and predict by."""
