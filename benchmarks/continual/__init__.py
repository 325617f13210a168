"""What growing and converting are worth: experiments that anyone can run again."""
