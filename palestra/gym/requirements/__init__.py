"""What the folders of servers require, and where it comes from. Begin at `folder_requirements`."""
