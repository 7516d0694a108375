"""What every part of the library stands on: tensors inside of objects, and tracing tools."""
