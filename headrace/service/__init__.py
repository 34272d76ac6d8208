"""What every service of Headrace shares: errors, serving, channels, configuration, telemetry."""
