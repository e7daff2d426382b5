"""What ops cost on a device: grids of shapes, measuring, fitting, the profile."""
