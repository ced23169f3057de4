"""Commands that use every room: `longctx train`. The others are modules of the room they show."""
