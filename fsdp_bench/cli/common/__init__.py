"""What several verbs share: options that describe a setup, hardware, pictures, interrupts."""
