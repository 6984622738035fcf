"""The exhibits, one file per part of the reference that they break; each fills its `HALL`."""
