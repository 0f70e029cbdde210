//! `tallow quantize`: a checkpoint with smaller matrices.

use anyhow::ensure;
use weights::quantize::{Format, Quantised, quantize};

use crate::{
    cli::{QuantFormat, QuantizeArgs},
    failure::Failure,
    interrupt, output,
    progress::Progress,
    terminal,
};

/// Writes the file.
///
/// # Errors
/// Usage, a checkpoint that cannot be read or quantised, an interruption; no file is left then.
pub(crate) fn run(args: &QuantizeArgs) -> Result<(), Failure> {
    check_names(args).map_err(Failure::Usage)?;
    output::check_place(&args.output)?;
    let format = match args.format {
        QuantFormat::Int8Convrot => Format::Int8ConvRot { group_size: args.group_size },
        QuantFormat::Fp8Scaled => Format::Fp8Scaled,
    };
    let source = weights::open(&args.input).map_err(anyhow::Error::from)?;
    let stop = interrupt::install(args.quiet)?;
    let progress = Progress::new(stop, 1, args.quiet);
    let report = match quantize(&*source, format, &args.output, &progress) {
        Ok(report) => report,
        Err(weights::Error::Cancelled(_)) => return Err(Failure::Interrupted),
        Err(error) => return Err(anyhow::Error::from(error).into()),
    };
    progress.clear();
    if !args.quiet {
        terminal::stderr_line(&summary(format, &report));
        terminal::stdout(&format!("{}\n", args.output.display()))?;
    }
    Ok(())
}

fn check_names(args: &QuantizeArgs) -> anyhow::Result<()> {
    let safetensors = args.output.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("safetensors"));
    ensure!(safetensors, "{} should end with .safetensors, which is what is written", args.output.display());
    Ok(())
}

fn summary(format: Format, report: &Quantised) -> String {
    let kept = report.kept.iter().map(|(reason, count)| format!("{count} {reason}"));
    let kept = kept.collect::<Vec<_>>().join(", ");
    let kept = if kept.is_empty() { "nothing".to_owned() } else { kept };
    format!(
        "{} matrices became {format}, {} became {}; kept: {kept}",
        report.matrices,
        terminal::bytes(report.bytes_before),
        terminal::bytes(report.bytes_after),
    )
}
