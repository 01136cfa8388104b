"""What a private step costs beside a non-private one, measured in one run, alternating."""
