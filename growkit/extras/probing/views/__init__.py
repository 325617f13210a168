"""Views of results of probes, one file each: ``VIEWS``, by the name of the class."""
