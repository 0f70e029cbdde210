//! The directory of a zip archive, read with suspicion.
//!
//! Format (PKWARE, "APPNOTE.TXT", sections 4.3 and 4.5.3): members with a local header each, then the central directory,
//! then its end record, before which a 64-bit version of that record may stand. PyTorch stores members uncompressed, so
//! their bytes are used where they lie; compressed and encrypted members are refused.

use std::{collections::HashMap, ops::Range};

use super::problem::PthError;
use crate::error::shown;

type Result<T, E = PthError> = std::result::Result<T, E>;

/// Most members that are listed; a checkpoint has one per tensor and a few more.
const MAX_MEMBERS: u64 = 1 << 18;

/// Longest comment after the end record, a 16-bit length.
const MAX_COMMENT: usize = u16::MAX as usize;

const LOCAL: u32 = 0x0403_4b50;
const CENTRAL: u32 = 0x0201_4b50;
const END: u32 = 0x0605_4b50;
const END64: u32 = 0x0606_4b50;
const LOCATOR64: u32 = 0x0706_4b50;

/// Number of the extra field with 64-bit sizes.
const ZIP64: u16 = 1;

/// A member as the directory describes it.
#[derive(Debug, Clone, Copy)]
struct Member {
    flags: u16,
    method: u16,
    packed: u64,
    size: u64,
    local: u64,
}

/// The members of an archive.
#[derive(Debug)]
pub(super) struct Archive<'a> {
    file: &'a [u8],
    /// Where the directory starts: the end of all members.
    directory: usize,
    members: HashMap<&'a str, Member>,
}

impl<'a> Archive<'a> {
    /// Reads the directory of an archive given as a whole.
    pub(super) fn parse(file: &'a [u8]) -> Result<Self> {
        let (range, count) = end_record(file)?;
        if count > MAX_MEMBERS {
            return Err(damaged("its directory lists more members than a checkpoint has"));
        }
        let directory = range.start;
        let mut members = HashMap::new();
        let mut at = Reader { bytes: &file[range], at: 0 };
        for _ in 0..count {
            let (name, member) = directory_entry(&mut at)?;
            if members.insert(name, member).is_some() {
                return Err(refuse(name, "stands twice in the directory"));
            }
        }
        Ok(Self { file, directory, members })
    }

    /// Paths of all members, in no order.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.members.keys().copied()
    }

    /// Where the bytes of a member lie in the file; `None` if there is no such member.
    pub(super) fn find(&self, name: &str) -> Result<Option<Range<usize>>> {
        let Some(member) = self.members.get(name) else { return Ok(None) };
        let refuse = |problem| Err(refuse(name, problem));
        if member.flags & 0x2041 != 0 {
            return refuse("is encrypted");
        }
        if member.method != 0 {
            return refuse("is compressed, which torch.save never does: save the checkpoint again");
        }
        if member.packed != member.size {
            return refuse("is not compressed, but has two sizes");
        }
        let local = usize::try_from(member.local).ok().filter(|&at| at < self.directory);
        let Some(local) = local else { return refuse("starts outside the archive") };
        let mut at = Reader { bytes: &self.file[..self.directory], at: local };
        let header = || damaged("a member's header is cut off");
        if at.u32().ok_or_else(header)? != LOCAL {
            return refuse("has no header where the directory says");
        }
        at.skip(22).ok_or_else(header)?;
        let (name_len, extra) = (at.u16().ok_or_else(header)?, at.u16().ok_or_else(header)?);
        if at.take(name_len.into()).ok_or_else(header)? != name.as_bytes() {
            return refuse("has another name in its own header");
        }
        at.skip(extra.into()).ok_or_else(header)?;
        let end = usize::try_from(member.size).ok().and_then(|size| at.at.checked_add(size));
        match end.filter(|&end| end <= self.directory) {
            Some(end) => Ok(Some(at.at..end)),
            None => refuse("is longer than the archive"),
        }
    }
}

/// Range of the directory, and how many members it lists.
fn end_record(file: &[u8]) -> Result<(Range<usize>, u64)> {
    const LEN: usize = 22;
    let first = file.len().saturating_sub(LEN + MAX_COMMENT);
    let last = file.len().checked_sub(LEN).ok_or(PthError::NoDirectory)?;
    let is_end = |&at: &usize| {
        let mut record = Reader { bytes: file, at };
        record.u32() == Some(END)
            && record.skip(16).is_some()
            && record.u16().is_some_and(|n| at + LEN + usize::from(n) == file.len())
    };
    let end = (first..=last).rev().find(is_end).ok_or(PthError::NoDirectory)?;
    let cut = || PthError::NoDirectory;
    let mut at = Reader { bytes: file, at: end + 4 };
    let (disk, start_disk) = (at.u16().ok_or_else(cut)?, at.u16().ok_or_else(cut)?);
    let (here, mut count) = (at.u16().ok_or_else(cut)?, u64::from(at.u16().ok_or_else(cut)?));
    let (mut size, mut offset) = (u64::from(at.u32().ok_or_else(cut)?), u64::from(at.u32().ok_or_else(cut)?));
    let mut limit = end;
    if let Some(end64) = locator64(file, end)? {
        let mut at = Reader { bytes: &file[..end], at: end64 };
        let bad = || damaged("its 64-bit end record is cut off");
        if at.u32().ok_or_else(bad)? != END64 {
            return Err(damaged("its 64-bit end record is not where it should be"));
        }
        // Length of the record, versions, disks, number of members on this disk.
        at.skip(8 + 2 + 2 + 4 + 4 + 8).ok_or_else(bad)?;
        count = at.u64().ok_or_else(bad)?;
        size = at.u64().ok_or_else(bad)?;
        offset = at.u64().ok_or_else(bad)?;
        limit = end64;
    } else if (disk, start_disk) != (0, 0) || u64::from(here) != count {
        return Err(damaged("it is one of several parts"));
    }
    let start = usize::try_from(offset).ok();
    let range = start.and_then(|start| Some(start..start.checked_add(usize::try_from(size).ok()?)?));
    match range.filter(|range| range.end <= limit) {
        Some(range) => Ok((range, count)),
        None => Err(damaged("its directory lies outside the file")),
    }
}

/// Position of the 64-bit end record, if the locator before the end record at `end` names one.
fn locator64(file: &[u8], end: usize) -> Result<Option<usize>> {
    const LEN: usize = 20;
    let Some(start) = end.checked_sub(LEN) else { return Ok(None) };
    let mut at = Reader { bytes: &file[..end], at: start };
    if at.u32() != Some(LOCATOR64) {
        return Ok(None);
    }
    let place = at.skip(4).and_then(|()| at.u64()).and_then(|offset| usize::try_from(offset).ok());
    match place.filter(|&place| place < start) {
        Some(place) => Ok(Some(place)),
        None => Err(damaged("its 64-bit end record lies outside the file")),
    }
}

/// One entry of the directory.
fn directory_entry<'a>(at: &mut Reader<'a>) -> Result<(&'a str, Member)> {
    let cut = || damaged("its directory is cut off");
    if at.u32().ok_or_else(cut)? != CENTRAL {
        return Err(damaged("its directory does not list as many members as it says"));
    }
    at.skip(4).ok_or_else(cut)?;
    let (flags, method) = (at.u16().ok_or_else(cut)?, at.u16().ok_or_else(cut)?);
    at.skip(8).ok_or_else(cut)?;
    let (packed, size) = (at.u32().ok_or_else(cut)?, at.u32().ok_or_else(cut)?);
    let (name, extra, comment) = (at.u16().ok_or_else(cut)?, at.u16().ok_or_else(cut)?, at.u16().ok_or_else(cut)?);
    at.skip(8).ok_or_else(cut)?;
    let local = at.u32().ok_or_else(cut)?;
    let name = at.take(name.into()).ok_or_else(cut)?;
    let extra = at.take(extra.into()).ok_or_else(cut)?;
    at.skip(comment.into()).ok_or_else(cut)?;
    let name = std::str::from_utf8(name).map_err(|_| damaged("a member's name is not UTF-8"))?;
    let mut member = Member { flags, method, packed: packed.into(), size: size.into(), local: local.into() };
    wide_sizes(extra, &mut member).ok_or_else(|| refuse(name, "has a damaged 64-bit size"))?;
    Ok((name, member))
}

/// Takes 64-bit values from the extra field for those that are all ones in the entry itself; `None` if it is damaged.
fn wide_sizes(extra: &[u8], member: &mut Member) -> Option<()> {
    let mut at = Reader { bytes: extra, at: 0 };
    while let (Some(kind), Some(len)) = (at.u16(), at.u16()) {
        let field = at.take(len.into())?;
        if kind != ZIP64 {
            continue;
        }
        let mut field = Reader { bytes: field, at: 0 };
        for value in [&mut member.size, &mut member.packed, &mut member.local] {
            if *value == u64::from(u32::MAX) {
                *value = field.u64()?;
            }
        }
    }
    Some(())
}

/// Little-endian numbers from a slice; `None` at its end.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let bytes = self.bytes.get(self.at..self.at.checked_add(len)?)?;
        self.at += len;
        Some(bytes)
    }

    fn skip(&mut self, len: usize) -> Option<()> {
        self.take(len).map(|_| ())
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.first_chunk().copied()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

fn damaged(problem: &'static str) -> PthError {
    PthError::Directory { problem }
}

fn refuse(name: &str, problem: &'static str) -> PthError {
    PthError::Member { member: shown(name), problem }
}
