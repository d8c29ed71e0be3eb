"""What each command takes, one file each; what it does is in `fedge.cli` and loaded when it is called."""
