"""What people write in LightningModules and callbacks, and what comes of it under every strategy."""
