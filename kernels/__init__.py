"""What runs on a device: tensors in, tensors out."""
