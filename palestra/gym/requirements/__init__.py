"""Requirements of the folders of servers, and the places that they come from. Begin at `folder_requirements`."""
