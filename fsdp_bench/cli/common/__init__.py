"""What several commands share: options that describe a setup, hardware, pictures, interrupts."""
