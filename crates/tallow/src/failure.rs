//! How a run ends badly: exit code and one line of text.

use std::fmt;

/// Why the command did not do what was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line cannot work, whatever the machine and the files are like: exit code 2.
    Usage(anyhow::Error),
    /// The run failed: exit code 1.
    Run(anyhow::Error),
    /// The user stopped the run: exit code 130, as a shell reports a process that Ctrl-C ended.
    Interrupted,
}

impl Failure {
    /// The exit code of the process.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Run(_) => 1,
            Self::Usage(_) => 2,
            Self::Interrupted => 130,
        }
    }

    /// A clap error, which is a small page, as a usage failure of one line.
    pub(crate) fn from_clap(error: &clap::Error) -> Self {
        Self::Usage(anyhow::Error::msg(clap_line(&error.render().to_string())))
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Run(error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The alternate form joins the causes with `: `.
            Self::Usage(error) | Self::Run(error) => f.write_str(&one_line(&format!("{error:#}"))),
            Self::Interrupted => f.write_str("interrupted"),
        }
    }
}

/// `text` on one line: line breaks become `; `, other control characters (which could drive a terminal) are escaped.
pub(crate) fn one_line(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let mut out = String::with_capacity(text.len());
    for character in lines.join("; ").chars() {
        if character.is_control() {
            out.extend(character.escape_default());
        } else {
            out.push(character);
        }
    }
    out
}

/// What clap says before its usage page, on one line and without `error: `; its paragraphs are hints to each other.
fn clap_line(page: &str) -> String {
    let lines = page.lines().map(str::trim);
    let said: Vec<_> =
        lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information")).collect();
    let paragraphs = said.split(|line| line.is_empty()).filter(|paragraph| !paragraph.is_empty());
    let line = paragraphs.map(|lines| lines.join(" ")).collect::<Vec<_>>().join("; ");
    line.strip_prefix("error: ").unwrap_or(&line).to_owned()
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn causes_are_joined_on_one_line() {
        let error = anyhow!("no such file\nbacktrace: 1").context("cannot read `a`").context("cannot load\x1b[31m");
        let failure = Failure::from(error);
        assert_eq!(failure.to_string(), "cannot load\\u{1b}[31m: cannot read `a`: no such file; backtrace: 1");
        assert_eq!(failure.exit_code(), 1);
    }

    #[test]
    fn usage_and_interruption_have_their_codes() {
        let usage = Err::<(), _>(anyhow!("x")).context("y").map_err(Failure::Usage).unwrap_err();
        assert_eq!((usage.exit_code(), usage.to_string().as_str()), (2, "y: x"));
        assert_eq!(Failure::Interrupted.exit_code(), 130);
    }

    #[test]
    fn clap_pages_shrink_to_a_line() {
        let page = "error: the following required arguments were not provided:\n  --output <FILE>\n\nUsage: tallow \
                    generate\n\nFor more information, try '--help'.\n";
        assert_eq!(clap_line(page), "the following required arguments were not provided: --output <FILE>");
        let page =
            "error: unexpected argument '--stepz' found\n\n  tip: a similar argument exists: '--steps'\n\nUsage: x";
        assert_eq!(clap_line(page), "unexpected argument '--stepz' found; tip: a similar argument exists: '--steps'");
    }
}
