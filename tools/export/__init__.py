"""`tepal export`: the model of a finished run as a folder for transformers, or as an ONNX file."""
