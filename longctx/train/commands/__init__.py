"""Commands that use all rooms, or none. Any other command is a module of the room that it shows."""
