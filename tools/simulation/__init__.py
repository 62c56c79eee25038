"""Simulation on one machine: engines that start what runs need."""
