"""What a run leaves on the disk, whole or not at all."""
