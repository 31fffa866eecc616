"""Models like another one: attention as its layer says."""
