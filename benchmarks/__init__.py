"""What the decoder costs, as ratios measured in one run: see README.md in this directory."""
