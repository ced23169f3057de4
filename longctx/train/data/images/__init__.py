"""Images in conversations: where they stand, and files of strangers that become RGB images."""
