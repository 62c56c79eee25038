"""What an experiment finds on this machine: devices, pretrained weights, memory, and the time that its trials take."""
